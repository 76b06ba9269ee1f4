import roofline

roofline.install()
